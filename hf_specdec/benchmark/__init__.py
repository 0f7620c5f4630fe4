"""The benchmark ledger: an experiment is a question, a results file its answer, with raw seconds and counts.

`experiment` reads the question, `arms` are the ways of decoding that are compared, `running` times them on the same
prompts, `ledger` keeps the answer, `environment` says where it was taken, `summary` turns it into numbers and `figures`
into pictures.
"""

__all__: list[str] = []
