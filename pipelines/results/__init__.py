"""What finished runs show: samples, scores, agreement, lm-eval, `verify`.

Results are read, never changed.
"""
