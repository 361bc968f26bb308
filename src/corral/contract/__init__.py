"""What Corral's processes say to each other.

Everyone may import this room; it imports only the standard library and the codec.
"""
