"""Mutation testing of the pure parts: small changes of the code that some test must notice."""
