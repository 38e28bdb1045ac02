"""`params.yaml`, profiles and presets, read strictly, and the reference pages made from them.

A file that loads is valid: an unknown key or a wrong value is an error that names it.
"""
