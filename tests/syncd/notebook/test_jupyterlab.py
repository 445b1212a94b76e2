"""The notebook opened and run by a person's browser, in JupyterLab.

    REGENERATE=1 python -m pytest tests/syncd/notebook/test_jupyterlab.py

makes docs/images/notebook.png anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from ends import PATIENCE
from notebooks import JupyterServer, Laptop, Machine
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from waiting import eventually

PICTURE = Path(__file__).parents[3] / "docs" / "images" / "notebook.png"
PROGRESS = """\
for n in $(seq 60); do
  printf '{"step": %d, "total": 60, "unit": "epoch", "message": "loss 0.%d"}' \\
    $n $((99 - n)) > "$SYNCD_PROGRESS_FILE.new"
  mv "$SYNCD_PROGRESS_FILE.new" "$SYNCD_PROGRESS_FILE"
  echo "epoch $n of 60"
  if [ $n = 40 ]; then until [ -e "{end}" ]; do sleep 0.1; done; fi
done
"""
chromium = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="needs chromium and its chromedriver (Debian: chromium-driver)",
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--window-size=1280,960", "--disable-gpu"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    service = Service(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def _output(browser: webdriver.Chrome) -> str:
    found = browser.find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output")
    return "\n".join(each.text for each in found)


@chromium
def test_the_notebook_opens_in_jupyterlab_as_it_is_and_its_cell_shows_the_worker(
    laptop: Laptop, machine: Machine, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    stages = laptop.layout.serve / "stages.toml"
    stages.write_text(f"[stages.pretrain]\ncommand = '''{PROGRESS.replace('{end}', str(end))}'''\n")
    (machine.home / ".syncd-key").write_text(laptop.key())
    path = machine.home / "syncd-jupyter.ipynb"
    laptop.bootstrap("--without-trainer", "--output", str(path))
    with JupyterServer(machine, application="jupyterlab") as server:
        browser.get(f"{server.url}/lab/tree/{path.name}?token={server.token}&reset")
        eventually(
            lambda: (
                browser.find_elements(By.CSS_SELECTOR, ".jp-CodeCell .cm-content")
                and "Idle" in browser.find_element(By.CSS_SELECTOR, "#jp-bottom-panel, body").text
            ),
            within=PATIENCE,
            what=lambda: browser.find_element(By.TAG_NAME, "body").text,
        )
        assert not browser.find_elements(By.CSS_SELECTOR, ".jp-Dialog")
        browser.find_element(By.CSS_SELECTOR, ".jp-MarkdownCell").click()
        for _ in ("the text", "the cell"):
            keys = ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ENTER)
            keys.key_up(Keys.SHIFT).perform()
        eventually(lambda: "running" in _output(browser), within=120, what=lambda: _output(browser))
        laptop.append("uname -sr")
        with open(laptop.layout.queue, "a") as queue:
            queue.write("run:pretrain\n")
        eventually(
            lambda: "40/60" in _output(browser) and "success" in _output(browser),
            within=PATIENCE,
            what=lambda: _output(browser),
        )
        _keep_picture(browser, tmp_path)
        end.touch()
        eventually(
            lambda: _output(browser).count("success") == 2,
            within=PATIENCE,
            what=lambda: _output(browser),
        )


def _keep_picture(browser: webdriver.Chrome, folder: Path) -> None:
    """Take a picture of the output; it is kept as documentation when that is asked for."""
    for no in browser.find_elements(By.XPATH, "//button[.='No']"):  # no news of Jupyter
        no.click()
    output = browser.find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output")[-1]
    browser.execute_script("arguments[0].scrollIntoView({block: 'end'})", output)
    picture = PICTURE if os.environ.get("REGENERATE") else folder / "notebook.png"
    picture.parent.mkdir(exist_ok=True)
    assert browser.save_screenshot(str(picture))
