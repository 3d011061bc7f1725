"""`kvpeer doctor`: what a machine is like, what kvpeer makes of it, and what is wrong."""
