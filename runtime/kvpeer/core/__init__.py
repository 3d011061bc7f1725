"""The pure machines: no clock, socket, thread, asyncio or random in here.

Time and randomness come in as arguments, and what is to be done goes out as values.
"""
