"""Does `specdec serve` speculate for OpenAI's clients, and can a request do no more than switch it?"""

import contextlib
import http.client
import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from typer.testing import CliRunner

import hf_specdec
from hf_specdec.cli import app
from hf_specdec.cli.models import fetch
from hf_specdec.host import serving
from tests.integration.pairs import llama, noisy_copy
from tests.integration.texts import save, text_pair, tokenizer

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

ROOT = Path(__file__).parents[2]
MESSAGES = [{"role": "user", "content": "hi there"}]
NEW = 48
REFUSED = "In a request speculative_config must be false, true or an integer from 1 to 32"


@pytest.fixture(autouse=True)
def verbosity_as_found():
    """The server's command sets how much transformers logs."""
    before = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Names of a target and a draft on disk; the target's folder holds another draft, which data could name."""
    folder = tmp_path_factory.mktemp("served")
    target, draft = text_pair()
    names = SimpleNamespace(target=save(target, folder / "target"), draft=save(draft, folder / "draft"), model=target)
    save(noisy_copy(target, seed=5), folder / "target" / "inner")
    return names


@contextlib.contextmanager
def started(folder, target, draft, *arguments):
    """A server on loopback, started from the command line in `folder`, stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.txt"
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    settings = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from hf_specdec.cli import app; app()", "serve", target, "--draft", draft]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", *arguments]  # the server's own
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | settings, cwd=folder)
    try:
        for _ in range(240):
            assert process.poll() is None, log.read_text()
            try:
                get(port, "/health")
                break
            except OSError:
                time.sleep(0.25)
        else:
            pytest.fail(log.read_text())
        yield SimpleNamespace(port=port, log=log, name=target)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(15)


@pytest.fixture(scope="module")
def server(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with started(folder, checkpoints.target, checkpoints.draft, "--num-speculative-tokens", "3") as server:
        yield server


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def last_report(server):
    (report,) = get(server.port, "/specdec/report")["models"].values()
    return report


def chat(server, stream=False, new=NEW, messages=MESSAGES, **extra):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=30, max_retries=0
    ) as client:
        answer = client.chat.completions.create(
            model=server.name,
            messages=messages,
            max_tokens=new,
            temperature=0,
            stream=stream,
            extra_body=extra or None,
        )
        if not stream:
            return answer.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)


@pytest.fixture(scope="module")
def plain(checkpoints):
    """The text of a plain greedy call in this process."""
    inputs = tokenizer().apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = checkpoints.model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return tokenizer().decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_plain_and_streamed_answers_are_plains_text_and_speculated(server, plain):
    for stream in (False, True):
        before = last_report(server)
        assert chat(server, stream) == plain
        report = last_report(server)
        assert report["reason"] is None
        assert report["emitted"] == NEW
        assert 0 < report["accepted"] < report["drafted"]
        assert max(report["draft_lengths"]) == 3
        assert report != before


def test_a_request_may_switch_off_and_choose_the_draft_length(server, plain):
    chat(server)
    before = last_report(server)
    assert chat(server, speculative_config=False) == plain
    assert last_report(server) == before  # a call without the flag leaves no report
    assert chat(server, speculative_config=True) == plain
    assert max(last_report(server)["draft_lengths"]) == 3
    assert chat(server, speculative_config=7) == plain
    assert max(last_report(server)["draft_lengths"]) == 7
    assert chat(server, generation_config=json.dumps({"speculative_config": 2, "do_sample": False})) == plain
    assert max(last_report(server)["draft_lengths"]) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "flag", [{"model": "inner"}, {"method": "draft_model", "model": "inner"}, "draft_model", 0, -1, 33, 1.5, [3]]
)
def test_a_request_cannot_name_a_model(server, plain, flag, stream):
    before = last_report(server)
    for extra in ({"speculative_config": flag}, {"generation_config": json.dumps({"speculative_config": flag})}):
        with pytest.raises(openai.BadRequestError, match=REFUSED):
            chat(server, stream, new=4, **extra)
    assert last_report(server) == before
    assert "named in data" not in server.log.read_text()
    assert chat(server) == plain


def test_other_endpoints_check_the_flag_too(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        options = {"model": server.name, "extra_body": {"speculative_config": {"model": "inner"}}}
        with pytest.raises(openai.BadRequestError, match=REFUSED):
            client.completions.create(prompt="hi", max_tokens=4, **options)
        with pytest.raises(openai.BadRequestError, match=REFUSED):
            client.responses.create(input="hi", max_output_tokens=4, **options)
        client.responses.create(input="hi", max_output_tokens=8, model=server.name, temperature=0)
        assert last_report(server)["emitted"] == 8
        client.completions.create(prompt="hi", max_tokens=9, model=server.name, temperature=0)
        assert last_report(server)["emitted"] == 9


def test_a_client_that_disconnects_does_not_break_the_next_request(server, plain):
    chat(server)
    before = last_report(server)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=server.name, messages=MESSAGES, max_tokens=1900, temperature=0, stream=True
        )
        assert any(chunk.choices[0].delta.content for chunk in stream)  # any() stops at the first text
        stream.close()
    assert chat(server, speculative_config=False) == plain  # waits until the abandoned call is over
    assert last_report(server) == before  # it was cancelled: one that ends leaves a report
    assert chat(server, stream=True) == plain
    assert last_report(server)["reason"] is None


def test_stop_strings_end_the_answer(server, plain):
    stop = plain[10:13]
    first = plain.index(stop) + len(stop)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=server.name, messages=MESSAGES, max_tokens=NEW, temperature=0, stop=[stop]
        )
    assert answer.choices[0].message.content == plain[:first]
    assert last_report(server)["reason"] is None


@pytest.mark.real
@pytest.mark.slow
def test_the_real_small_pair_is_served(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, draft = str(fetch("smollm2-135m")), str(fetch("smol-draft"))
    words = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype="float32").eval()
    inputs = words.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    plain = words.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    with started(tmp_path, target, draft, "--dtype", "float32") as server:
        for stream in (False, True):
            assert chat(server, stream, speculative_config=2) == plain
            report = last_report(server)
            assert report["reason"] is None
            assert report["accepted"] > 0
        assert chat(server) == plain  # K as it is chosen here
        assert last_report(server)["reason"] is None


# --- without a server ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, False, True, 1, 32])
def test_flags_that_a_request_may_hold(value):
    assert serving.request_flag(value) is value


@pytest.mark.parametrize("value", [0, 33, -2, 1.0, "auto", "", {}, {"model": "org/model"}, [], [1]])
def test_flags_that_a_request_may_not_hold(value):
    with pytest.raises(ValueError, match=REFUSED + ".*specdec serve --draft"):
        serving.request_flag(value)


@pytest.fixture
def manager(checkpoints):
    """Makes ModelManagers, whose models and timers go at the end."""
    from transformers.cli.serving.model_manager import ModelManager

    made = []

    def make(**options):
        made.append(ModelManager(device="cpu", **options))
        return made[-1]

    def load(name):
        models = make()
        return models, models.load_model_and_processor(models.process_model_name(name))[0]

    make.load = load

    yield make
    for one in made:
        one.shutdown()


def runs(monkeypatch, body):
    """`hf_specdec.serve.serve`, with `body` in place of the server."""
    import hf_specdec.serve

    monkeypatch.setattr("hf_specdec.serve.transformers_serve", lambda arguments, program: body())
    return hf_specdec.serve.serve


def test_a_draft_that_does_not_fit_is_an_error_for_a_pinned_model_and_a_warning_for_others(
    checkpoints, manager, monkeypatch, tmp_path, caplog
):
    other = save(llama(vocab_size=4000), tmp_path / "other")

    def pinned():
        manager(force_model=other)

    def on_demand():
        _, model = manager.load(other)
        assert not hf_specdec.integration.binding.bindings_of(model)

    with pytest.raises(ValueError, match=r"The target has 4,000 token rows and the draft 100"):
        runs(monkeypatch, pinned)([], checkpoints.draft)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        runs(monkeypatch, on_demand)([], checkpoints.draft)
    assert f"{other} is served plainly: The target has 4,000 token rows" in caplog.text


def test_a_flag_in_the_checkpoint_is_served_without_options(checkpoints, manager, monkeypatch, tmp_path):
    folder = tmp_path / "target"
    save(checkpoints.model, folder)
    save(noisy_copy(checkpoints.model), folder / "inner")
    path = folder / "generation_config.json"
    flag = {"model": "inner", "num_speculative_tokens": 2}
    written = json.loads(path.read_text()) | {"speculative_config": flag}
    written.pop("_from_model_config", None)
    path.write_text(json.dumps(written))

    def body():
        from transformers.cli.serving.utils import BaseHandler, GenerationState

        models, model = manager.load(str(folder))
        config = BaseHandler(models, GenerationState())._build_generation_config({}, model.generation_config)
        config.max_new_tokens = 12
        inputs = tokenizer()("hi", return_tensors="pt")
        ids = model.generate(**inputs, generation_config=config)
        report = hf_specdec.report(model)
        assert report.reason is None
        assert report.draft_lengths[0] == 2
        assert ids.tolist() == checkpoints.model.generate(**inputs, max_new_tokens=12).tolist()

    runs(monkeypatch, body)([])


def test_a_request_for_speculation_without_a_draft_is_refused(checkpoints, manager, monkeypatch):
    def body():
        from transformers.cli.serving.utils import BaseHandler, GenerationState

        models, model = manager.load(checkpoints.target)
        handler = BaseHandler(models, GenerationState())
        for flag in (True, 4):
            with pytest.raises(serving.RequestError, match="This server has no draft for the model"):
                handler._build_generation_config({"speculative_config": flag}, model.generation_config)
        off = handler._build_generation_config({"speculative_config": False}, model.generation_config)
        assert off.speculative_config is False
        with pytest.raises(serving.RequestError, match="continuous_batching, which does not speculate"):
            handler._build_generation_config({"speculative_config": True}, model.generation_config, use_cb=True)
        with pytest.raises(serving.RequestError, match="generation_config must be a JSON object as text"):
            handler._validate_request({"generation_config": {"speculative_config": 3}})
        with pytest.raises(serving.RequestError, match="generation_config must be a JSON object as text, got list"):
            handler._validate_request({"generation_config": "[1]"})

    runs(monkeypatch, body)([])


def test_continuous_batching_is_said_to_bypass_the_plugin(checkpoints, manager, monkeypatch, caplog):
    def body():
        _, model = manager.load(checkpoints.target)
        assert model.generation_config.speculative_config is None

    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        runs(monkeypatch, body)(["--continuous_batching"], checkpoints.draft)
    assert "bypasses hf_specdec: nothing is speculated on. The draft is not loaded." in caplog.text


def test_hooks_are_gone_afterwards(monkeypatch):
    from transformers.cli.serving import model_manager, server, utils

    def hooks():
        handler = utils.BaseHandler
        return (
            model_manager.ModelManager._load_model,
            handler._validate_request,
            handler._build_generation_config,
            server.build_server,
        )

    before, during = hooks(), []
    runs(monkeypatch, lambda: during.append(hooks()))([])
    assert hooks() == before
    assert not set(during[0]) & set(before)


def test_an_unknown_server_is_not_started(monkeypatch):
    from transformers.cli.serving import utils

    def changed(self, request):
        pass

    monkeypatch.setattr(utils.BaseHandler, "_validate_request", changed)
    with pytest.raises(RuntimeError, match="specdec serve does not know this transformers .* takes no body"):
        runs(monkeypatch, lambda: pytest.fail("started"))([])


def test_missing_libraries_are_named(monkeypatch):
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_serve_available", lambda: False)
    with pytest.raises(ImportError, match=r"pip install 'hf_specdec\[serve\]'"):
        runs(monkeypatch, lambda: pytest.fail("started"))([])


def test_command_passes_the_servers_arguments_on(monkeypatch):
    seen = []
    monkeypatch.setattr("hf_specdec.serve.transformers_serve", lambda arguments, program: seen.append(arguments))
    done = CliRunner().invoke(
        app, ["serve", "org/model", "--port", "9", "--draft", "org/draft", "--enable-cors", "--device", "cpu"]
    )
    assert done.exit_code == 0, done.output
    assert seen == [["org/model", "--port", "9", "--enable-cors", "--device", "cpu"]]


def test_command_ends_with_status_1_and_one_message_if_the_draft_does_not_exist(checkpoints):
    done = CliRunner().invoke(app, ["serve", checkpoints.target, "--draft", "./nowhere", "--device", "cpu"])
    assert done.exit_code == 1
    assert "Error: The draft's folder './nowhere' does not exist." in done.output
    assert CliRunner().invoke(app, ["serve", "--num-speculative-tokens", "0"]).exit_code == 2
