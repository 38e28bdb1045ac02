"""What an evaluation measures, as pure functions of answers: no torch, so both planes read it.

In reading order: `answers` (a policy's responses), `estimates` (pass@k, votes, intervals),
`contest` (one policy against another), `measures` (the numbers that are published), `tasks` (the
same for each task) and `folder` (all of it on disk).
"""
