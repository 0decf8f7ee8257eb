"""The page as it is sent: whole, from here alone, and open where the rest asks for a key."""

import re

import pytest

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
OPTIONS = {"api_keys": ("right",)}


def test_browsers_get_the_page_and_programs_json(http) -> None:
    page = http.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html") and "<main hidden>" in page.text
    assert http.get("/").json()["name"] == "vllm-mlx"
    assert http.head("/", headers=BROWSER).status_code == 200


def test_all_that_the_page_names_is_here_and_needs_no_key(http) -> None:
    named, found = ["/"], {}
    while named:
        path = named.pop()
        answer = http.get(path, headers=BROWSER)
        assert answer.status_code == 200, path
        found[path] = answer
        parts = re.findall(r'(?:src|href)="(/page/[^"]+)"', answer.text)
        parts += [f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', answer.text)]
        named += [part for part in parts if part not in found]
    assert {path.rpartition(".")[2] for path in found} == {"/", "css", "js"} and len(found) >= 7
    for answer in found.values():
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
        assert "innerHTML" not in answer.text and "eval(" not in answer.text
    assert http.get("/v1/status").status_code == 401


@pytest.mark.parametrize("path", ["/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/app.py"])
def test_nothing_else_of_the_package_is_sent(http, path: str) -> None:
    assert http.get(path).status_code in (401, 404)
