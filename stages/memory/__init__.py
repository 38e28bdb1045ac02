"""What a stage needs of a GPU's and of a node's memory, from the model's sizes, params and profile.

Pure arithmetic, without torch: both planes may import it, and no stage does, so that it bears no
stage's identity. shape.py reads a model's sizes, model.py has what a model takes while it learns,
reads and samples, work.py the moments of a stage's work, stage.py which of them each stage has.
"""
