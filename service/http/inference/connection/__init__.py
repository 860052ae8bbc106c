"""A client's connection: its limits, and answers to requests whose head is known already.

Everything that leans on the inside of uvicorn is here.
"""
