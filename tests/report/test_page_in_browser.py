"""The report page in a real browser: Debian's Chromium, driven by Playwright."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from kinfed.cli import main
from kinfed.report.page.html_page import write

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.needs("chromium", "chromium"), pytest.mark.xdist_group("browser")]

WEIGHTS = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.8, 0.06, 0.04], [0.0, 0.25, 0.75, 0.0], [0.4, 0.3, 0.2, 0.1]])
FIRST = np.full((4, 4), 0.25)
SCORES = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.9]]
EVIL = "<img src=x onerror=window.bad=1>"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        # In continuous integration tests run as root, where Chromium has no sandbox.
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page on these runs; gives the page and what it complained of or asked the network for."""
    contexts = []

    def open_page(*folders):
        out, problems = tmp_path / "page.html", []
        write(folders, out)
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}))
        page = contexts[-1].new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url) if request.url != out.as_uri() else None)
        page.goto(out.as_uri())
        page.locator("body[data-drawn]").wait_for()
        return page, problems

    yield open_page
    for context in contexts:
        context.close()


def test_sliders_change_the_links_and_a_click_shows_the_files_numbers(opened, tmp_path, run_of):
    facts = {"train": [8, 7, 6, 5], "validation": [1] * 4, "test": [10] * 4, "classes": ["cat", "dog"]}
    mine = run_of(
        tmp_path / "mine", SCORES, [FIRST, WEIGHTS], facts=facts | {"counts": [[9, 1], [5, 5], [0, 10], [4, 6]]}
    )
    run_of(mine / "beside" / "local", [[0.1] * 4, [0.4, 0.6, 0.8, 0.4]], [np.eye(4)] * 2, method="local")
    page, problems = opened(mine)
    links = page.locator("#links")
    page.locator("#threshold").fill("0")
    playwright.expect(links).to_contain_text("9 of 9 links shown")  # three of twelve are zero
    page.locator("#threshold").fill("100")
    playwright.expect(links).to_contain_text("1 of 9 links shown")
    page.locator("#round").fill("0")  # every weight is 0.25, below 0.4
    playwright.expect(links).to_contain_text("0 of 12 links shown")
    page.locator("#round").fill("1")
    x, y = page.evaluate("spots[3]")[:2]
    page.locator("#net").click(position={"x": x, "y": y})
    panel = page.locator("#panel")
    playwright.expect(panel.locator("h3")).to_have_text("Client c3")
    assert "+50.0 points over Local" in panel.inner_text()
    assert "5 are better, 0 worse, 5 the same (p = 0.063" in panel.inner_text()
    heard = panel.locator("table").first.locator("tbody tr").all_inner_texts()
    assert [line.split()[:2] for line in heard] == [["c0", "0.400"], ["c1", "0.300"], ["c2", "0.200"]]
    assert "50 %" in heard[0]  # labels in common: 40 % cats and 10 % dogs
    exact = panel.get_by_label("Its scores").locator("tbody span").first.get_attribute("title")
    assert f"2,c3,own,test,accuracy,{exact.removesuffix(' in history.csv')}\n" in (mine / "history.csv").read_text()
    page.locator("#heat").focus()
    page.keyboard.press("ArrowRight")
    playwright.expect(panel.locator("h3")).not_to_have_text("Client c3")
    page.locator("#play").click()
    playwright.expect(page.locator("#round-value")).to_contain_text("1")
    assert not problems


def test_markup_in_a_folder_is_text_in_the_page(opened, tmp_path, run_of):
    names = [EVIL, "</script><script>window.bad=1</script>", "c", "d"]
    page, problems = opened(run_of(tmp_path / "mine", SCORES, [FIRST, WEIGHTS], names=names, method=EVIL))
    page.locator("#client").fill(EVIL)
    page.locator("#client").press("Enter")
    playwright.expect(page.locator("#panel h3")).to_have_text(f"Client {EVIL}")
    assert page.evaluate("window.bad") is None
    assert page.locator("img").count() == 0
    assert not problems


def test_a_run_without_relations_says_what_it_has_instead(opened, tmp_path, run_of):
    page, problems = opened(run_of(tmp_path / "mine", SCORES, method="partial-pooling"))
    playwright.expect(page.locator("#instead")).to_contain_text("keeps no graph of who learns from whom")
    playwright.expect(page.locator("#instead")).to_contain_text("Partial pooling: linear models")
    assert page.locator("#heat").is_hidden()
    assert page.locator("#net").is_hidden()
    assert "so nobody can say whether it was helped" in page.locator("#panel").inner_text()
    assert not problems


def test_of_a_solved_model_the_weight_of_own_rows_is_a_table_of_all_clients(opened, tmp_path):
    table = Path(__file__).parents[2] / "examples" / "shops.csv"
    asked = ["run", str(table), "--client", "shop", "--target", "buys", "--quiet", "--out", str(tmp_path / "run")]
    assert main([*asked, "--method", "partial-pooling", "--beside", "none", "model=linear", "rounds=3"]) == 0
    page, problems = opened(tmp_path / "run")
    playwright.expect(page.locator("#instead")).to_contain_text("to the mean of all clients, column by column")
    assert page.locator("#columns tbody tr").count() == 30
    assert page.locator("#columns thead th").all_inner_texts()[:3] == ["Client", "age", "basket"]
    page.locator("#columns button", has_text="shop 7").click()
    playwright.expect(page.locator("#panel h3")).to_have_text("Client shop 7")
    rows = page.locator("#panel table").first.locator("tbody tr")
    for row in rows.all():
        own, rest = map(float, row.locator("td").all_inner_texts()[1:])
        assert own + rest == pytest.approx(1, abs=0.011)
    assert not problems


def test_of_learning_alone_clients_are_ranked_by_their_scores(opened, tmp_path, run_of):
    page, problems = opened(run_of(tmp_path / "alone", SCORES, [np.eye(4)] * 2, method="local"))
    assert page.locator("#clients-title").inner_text() == "Clients, by score"
    playwright.expect(page.locator("#ranked-hint")).to_contain_text("each client's own model, trained alone")
    assert not problems


def test_more_clients_than_are_drawn_one_by_one_have_their_strongest_links(opened, tmp_path, run_of):
    rng = np.random.default_rng(0)
    page, problems = opened(run_of(tmp_path / "many", rng.random((2, 207)), rng.random((2, 207, 207))))
    page.locator("#threshold").fill("0")
    playwright.expect(page.locator("#links")).to_contain_text("4,140 of 4,140 links shown")
    assert "the 20 strongest are shown, as there are 207 clients" in page.locator("main").inner_text()
    assert not problems


def test_of_a_table_each_column_opens_its_runs_and_back_leads_to_the_table(opened, tmp_path, run_of):
    head = "column,dataset,setting,method,printed,metric,paper,paper_std,measured,over_seeds,seeds,flags,status,by_seed"
    lines = [head]
    for column, score in (("mnist", 0.5), ("svhn", 0.7)):
        run_of(
            tmp_path / "t" / "runs" / column / "fedaghn" / "seed-0", [[score, score]], [FIRST[:2, :2]], dataset=column
        )
        lines.append(f"{column},{EVIL},iid,fedaghn,FedAGHN,accuracy_pct,90,,{100 * score},,1,,,0:{100 * score}")
    (tmp_path / "t" / "table.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "t" / "table.md").write_text(f"# fedaghn.table9: {EVIL}\n")
    page, problems = opened(tmp_path / "t")
    playwright.expect(page.locator("#front h1")).to_have_text(f"fedaghn.table9: {EVIL}")
    assert page.locator("#graph").count() == 0
    page.get_by_role("link", name="svhn").click()
    playwright.expect(page.locator("#shown .lead")).to_contain_text("70.0 % over 2 clients")
    playwright.expect(page.locator("[aria-current]")).to_contain_text("svhn")
    assert page.locator("#front").is_hidden()
    page.go_back()
    playwright.expect(page.locator("#front h1")).to_be_visible()
    assert page.evaluate("window.bad") is None
    assert not problems
