"""The compute plane: trains, generates and scores. Imports no dvc, prefect, mlflow or submitit."""
