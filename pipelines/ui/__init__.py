"""The pages of `lockstep ui`: what a clone holds, and what its owner may do there, in a browser.

It reads through the rooms below and keeps no state of its own but the token; it imports no torch.
May import every room above it in the table of docs/architecture.md.
"""
