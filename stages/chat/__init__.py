"""A finished policy that answers while somebody waits: `python -m stages.chat.engine`.

It renders a dialogue as prepare does, and samples as rollout does: one dialogue at a time, token by
token. It is no stage: no map of `code/` holds it, and nothing here can make a stage run again.
"""
