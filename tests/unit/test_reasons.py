"""What is said once is said once, whoever asks at the same time; an input is a reason only if it holds something."""

import logging
import threading
import time

import pytest
import torch

from hf_specdec.host import reasons


class Model(torch.nn.Module):
    """Anything that can be held weakly."""


class SlowSet(set):
    """Takes so long to look that whoever is not kept waiting looks too."""

    def __contains__(self, fact):
        found = super().__contains__(fact)
        time.sleep(0.02)
        return found


def test_threads_that_give_the_same_reason_at_once_log_it_once(caplog):
    model, start = Model(), threading.Barrier(8)
    reasons._WARNED[model] = SlowSet()

    def say():
        start.wait()
        reasons.warn_once(model, "beam search")

    threads = [threading.Thread(target=say) for _ in range(8)]
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [record.getMessage() for record in caplog.records] == [
        "Model decodes plainly, without speculation: beam search."
    ]


@pytest.mark.parametrize("value", [{}, [], ()])
def test_empty_container_among_the_inputs_is_no_reason(value):
    assert reasons._why_inputs({"mm_encoder_outputs": value, "use_cache": True}) is None


@pytest.mark.parametrize("value", [{"image": None}, [0], (0,), torch.empty(0), torch.zeros(2, 3)])
def test_an_input_that_the_loop_does_not_carry_on_is_a_reason(value):
    assert reasons._why_inputs({"token_type_ids": value}) == "model input token_type_ids"
