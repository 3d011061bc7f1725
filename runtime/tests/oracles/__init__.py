"""Plain models of the promises: slow, obvious, and compared with what really runs."""
