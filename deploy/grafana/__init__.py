"""The dashboard, as code and as a picture."""
