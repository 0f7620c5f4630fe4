"""The parts of `gpu_check.py`: nets without downloads, stages, predictions, and the table at the end."""
