"""One loop, and the learners that take its steps."""
