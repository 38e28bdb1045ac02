"""What a stage needs of a GPU's and of a node's memory, from the model's sizes, params and profile.

Pure arithmetic, without torch: both planes may import it, and no stage does, so that it bears no
stage's identity. shape.py reads a model's sizes, model.py has what a model takes while it learns,
reads and samples, stage.py which models a stage holds at once.
"""
