"""The messages, one module per noun.

Fields marked `since protocol N` are ours and optional; the others are the contract's.
"""
