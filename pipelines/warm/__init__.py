"""Processes that are ready: what takes seconds to import is imported once, and forked for each use.

Always true: warmth is only a cache. What runs in a forked process ends with the same bytes as in a
fresh one, and where no server can be had, a fresh process is started instead.
"""
