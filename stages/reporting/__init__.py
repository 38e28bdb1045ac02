"""The parts of the report: what it reads, what it concludes, and how it draws and words that."""
