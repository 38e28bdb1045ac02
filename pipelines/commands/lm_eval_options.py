"""The words after `lockstep lm-eval`. Imports little: every command's parser needs it."""

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", help="sft, iter_001, ...")
    parser.add_argument(
        "--tasks", required=True, metavar="A,B", help="names that lm-eval knows, or those of yours"
    )
    parser.add_argument(
        "--include-path", metavar="FOLDER", help="a folder with task files (YAML) of your own"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N of each task")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples in the prompt")
    parser.add_argument("--batch-size", metavar="N", help="a number, or auto (default: lm-eval's)")
    parser.add_argument("--device", help="cpu, cuda:0, ... (default: lm-eval's choice)")
    parser.add_argument(
        "--chat", action="store_true", help="put prompts through the model's chat template"
    )
    parser.add_argument(
        "--mlflow", action="store_true", help="log the results to the evaluation's MLflow run"
    )
    parser.add_argument(
        "--python", metavar="FILE", help="the interpreter that has lm-eval (default: this one)"
    )
