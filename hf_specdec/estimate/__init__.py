"""Will it help? What a pair costs on this machine, how much of its drafts is kept, and the speeds that follow."""

from hf_specdec.estimate.measuring import run_estimate
from hf_specdec.estimate.prediction import looked_up, predict
from hf_specdec.estimate.result import Estimate, KindEstimate, LengthRow, Prediction

__all__ = ["Estimate", "KindEstimate", "LengthRow", "Prediction", "looked_up", "predict", "run_estimate"]
