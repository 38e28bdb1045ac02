"""`.lockstep/jobs`: entries, attempts, their states, publishing, clean-up, stop requests.

A state is not stored but read off files; each file has one writer.
"""
