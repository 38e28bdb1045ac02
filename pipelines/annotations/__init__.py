"""What people prefer: judgements of two responses, the queue of pairs, agreement, the export.

Judgements are given data: they are only ever appended to, and no stage reads them. What a stage
reads is a file that `export` made of them, where params.yaml names its folder.
"""
