"""Requests in, token ids and log-probs out: the protocol, and the engines behind it."""
