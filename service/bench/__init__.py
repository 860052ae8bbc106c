"""`dss bench`: how fast a bundle answers, in process and over HTTP."""
