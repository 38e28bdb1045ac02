"""`lockstep`: one file a command, its options beside it.

Errors are caught here and printed without a traceback.
"""
