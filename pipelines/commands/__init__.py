"""The commands, one file each: a function whose arguments are the options, its docstring the help.

Always true: only the file of the command that is called is imported, and it imports what it runs
inside the function. Every other room may be imported from here; none imports this one.
"""
