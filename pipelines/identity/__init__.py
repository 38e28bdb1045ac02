"""What a stage's result depends on: its code, inputs, params; copies of the code; the machine.

The same identity is the same bytes; nothing of the execution enters it.
"""
