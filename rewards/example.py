"""A reward function to begin with."""


def brief(responses: list[str], answers: list[str | None]) -> list[float]:
    """1 for a response that is the answer and nothing else, less for each word around it."""
    return [
        1 / max(len(response.split()), 1) if answer is not None and answer in response else 0.0
        for response, answer in zip(responses, answers, strict=True)
    ]
