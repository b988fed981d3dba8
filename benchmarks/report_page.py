"""How long the report page takes to open in Chromium, on the clock and of the processor, by the number of clients.

    python benchmarks/report_page.py [--clients 20,207,2000] [--times 5]
    python benchmarks/report_page.py --picture RUN    # draws docs/report-top.png, -graph and -dark of that run's page

Made-up runs of 20 rounds, with Local and FedAvg beside them. The clock runs from the page's address to its first
drawing, in a new tab each time; the best of several is given, as other programs can only delay it.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from playwright.sync_api import sync_playwright

from kinfed.core.history import History
from kinfed.core.summary import DataFacts, RunCost, summarise_history
from kinfed.core.tasks import Classification
from kinfed.report.page.html_page import write
from kinfed.runs.run_folder import RunFolder
from kinfed.runs.tested_examples import Tested

ROUNDS, GROUPS, CLASSES = 20, 5, 10
DOCS = Path(__file__).parents[1] / "docs"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="20,207,2000")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--picture", type=Path, metavar="RUN")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for count in map(int, given.clients.split(",") if given.picture is None else ()):
            run = made_up(Path(folder) / str(count), count)
            begin, page = time.process_time(), Path(folder) / f"{count}.html"
            write([run], page)
            wrote, size = time.process_time() - begin, page.stat().st_size / 1e6
            clock, processor = zip(*(time_opening(browser, page) for _ in range(given.times)), strict=True)
            best = f"{min(clock):.2f} s on the clock, {min(processor):.2f} s of the processor (best of {given.times})"
            print(
                f"{count:,} clients: {size:.2f} MB, written in {wrote:.1f} s of the processor; open in {best}",
                flush=True,
            )
        if given.picture is not None:
            write([given.picture], page := Path(folder) / "page.html")
            draw_page(browser, page)
        browser.close()


def draw_page(browser, page):
    """Draw what stands before the graph; the graph and one client; and on a dark screen the graph by gain."""
    tab = show_page(browser, page, "light")
    end = place(tab, "#graph")
    tab.screenshot(path=DOCS / "report-top.png", full_page=True, clip=part(0, end - 20))
    choose(tab, "Group", "5")
    begin, end = place(tab, "#graph"), place(tab, "#clients-title")
    tab.screenshot(path=DOCS / "report-graph.png", full_page=True, clip=part(begin - 30, end - 30))
    tab = show_page(browser, page, "dark")
    choose(tab, "Gain over the best baseline without others", "10")
    begin, end = place(tab, "#graph"), place(tab, ".picker")
    tab.screenshot(path=DOCS / "report-dark.png", full_page=True, clip=part(begin - 30, end - 20))


def show_page(browser, page, scheme):
    tab = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    tab.goto(page.as_uri())
    tab.locator("body[data-drawn]").wait_for(state="attached")
    return tab


def choose(tab, colour, client):
    tab.locator("#colour").select_option(label=colour)
    tab.locator("#client").fill(client)
    tab.locator("#client").press("Enter")
    tab.locator("#client").blur()


def place(tab, what):
    """Where it begins, in pixels from the top of the whole page, however far it is scrolled."""
    return tab.locator(what).evaluate("one => one.getBoundingClientRect().top + scrollY")


def part(begin, end):
    return {"x": 0, "y": begin, "width": 1280, "height": end - begin}


def made_up(path, count):
    """The folder of a run whose clients hear their group, with Local and FedAvg beside it."""
    draw = np.random.default_rng(0)
    groups = np.arange(count) % GROUPS
    for base, lift in (("local", 0.5), ("fedavg", 0.45), ("fedaghn", 0.6)):
        folder = RunFolder(path if base == "fedaghn" else RunFolder(path).reference(base).path)
        folder.create()
        names = tuple(f"client-{i}" for i in range(count))
        history = History(names, Classification(CLASSES))
        for t in range(ROUNDS):
            scores = torch.from_numpy(draw.binomial(50, lift * (t + 5) / (ROUNDS + 5), count) / 50).float()
            history.rounds.append(t)
            every = {("test", "accuracy"): scores, ("test", "loss"): 1 - scores, ("validation", "accuracy"): scores}
            history.scores.append({("own", *key): value for key, value in every.items()})
            if base == "fedaghn":
                weights = draw.random((count, count), np.float32) * np.where(groups[:, None] == groups, 1, 0.1)
                history.kept_relations.append(torch.from_numpy((weights / weights.sum(1, keepdims=True)).astype("f4")))
        history.chosen = "own"
        data = DataFacts(dataset="made up", federation={"dataset": {"name": "made up"}}, clients=count)
        cost = RunCost(parameters=1000, executor="loop", seconds=1.0, bytes_up=0, bytes_down=0)
        relation = {"origin": "learned"} if history.kept_relations else None
        summary = summarise_history(history, method=base, seeds=[0], data=data, cost=cost, relation=relation)
        history.origin = "learned"
        folder.write_history(history, [])
        right = [(np.arange(50) < round(50 * score)).astype(np.float32) for score in scores.tolist()]
        blocks = dict.fromkeys(names, np.arange(50))
        Tested({}, dict(zip(names, right, strict=True)), blocks=blocks).write(folder.tested)
        folder.write_summary(summary)
    return path


def time_opening(browser, page):
    """Seconds from the address to the first drawing, on the clock and of the page's process."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    watch = context.new_cdp_session(tab)
    watch.send("Performance.enable", {"timeDomain": "threadTicks"})
    begin = time.perf_counter()
    tab.goto(page.as_uri())
    tab.locator("body[data-drawn]").wait_for(state="attached")
    clock = time.perf_counter() - begin
    spent = {metric["name"]: metric["value"] for metric in watch.send("Performance.getMetrics")["metrics"]}
    context.close()
    return clock, spent["TaskDuration"]


if __name__ == "__main__":
    main()
