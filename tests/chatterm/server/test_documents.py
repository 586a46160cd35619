"""The page about the server, the dashboard and the examples: what they say is so."""

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from chatterm.server.http.limits import AdmissionQueue, Limits
from chatterm.server.http.metrics import Recorder, exposition
from chatterm.server.http.ollama.requests import CHAT, GENERATE, OPTIONS
from chatterm.server.http.openai import chat, completions, responses
from chatterm.server.service import Health, Metrics, ModelMetrics
from tests.chatterm.server.fake import FakeService, serving

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "server.md").read_text()


@pytest.mark.parametrize("table", [chat.TABLE, completions.TABLE, responses.TABLE, CHAT, GENERATE, OPTIONS])
def test_every_field_is_described(table):
    assert [name for name in table.known.__struct_fields__ if f"`{name}`" not in PAGE] == []


async def test_the_dashboard_and_the_page_show_figures_that_there_are():
    recorder = Recorder()
    recorder.of("tiny").finished["stop"] += 1
    recorder.responses["/health", 200] += 1
    model = ModelMetrics(
        model="tiny",
        running=1,
        waiting=1,
        kv_usage=0.5,
        prompt_tokens=1,
        cached_tokens=1,
        generated_tokens=1,
        preemptions=0,
        drafted_tokens=1,
        accepted_tokens=1,
    )
    text = exposition(recorder, AdmissionQueue(Limits()), Metrics(models=(model,)), Health(True))
    known = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    shown = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|chatterm):\w+", target["expr"])
    }
    assert len(shown) > 10
    assert shown <= known
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known}
    assert set(re.findall(r"`(vllm:\w+)`", PAGE)) <= families


@pytest.mark.parametrize("name", ["openai_client.py", "langchain_chain.py", "langchain_agent.py"])
def test_an_example_works(name, tmp_path, capsys):
    def say(request, index):
        if request.tools and request.messages[-1].role != "tool":
            call = '{"name": "length", "arguments": {"word": "Mississippi"}}'
            return [("answer", f"<tool_call>{call}</tool_call>")]
        return [("answer", f"Said after {request.messages[-1].content}")]

    source = (ROOT / "examples" / name).read_text()
    with serving(FakeService(say=say)) as running:
        source = source.replace("http://127.0.0.1:8642", running.url)
        path = tmp_path / name
        path.write_text(re.sub(r'model="[^"]+"', 'model="tiny"', source))
        runpy.run_path(str(path))
    said = capsys.readouterr().out
    assert "Said after" in said
    assert "agent" not in name or "Said after 11" in said


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_example_of_curl_works(tmp_path):
    source = (ROOT / "examples" / "curl.sh").read_text()
    with serving(FakeService()) as running:
        path = tmp_path / "curl.sh"
        path.write_text(source.replace("http://127.0.0.1:8642", running.url).replace("smollm2", "tiny"))
        found = subprocess.run(["sh", str(path)], capture_output=True, text=True, check=True)
        assert running.service.asked[-1].constraint.kind == "json_schema"
    assert "data: [DONE]" in found.stdout
    assert (
        json.loads(found.stdout.rpartition("\n")[2])["choices"][0]["message"]["content"]
        == "Where is the Nile?"
    )


def test_the_batch_is_one():
    lines = (ROOT / "examples" / "batch.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["rivers", "lakes", "seas"]
