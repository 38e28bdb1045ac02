"""A finished policy for others: a folder with a model card, and a version in a registry.

Files are those of the policy, bit by bit, unless another form was asked for.
"""
