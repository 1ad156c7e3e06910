"""What `tools/check_variables.py` finds."""

from __future__ import annotations

from pathlib import Path

from support.scripts import module_of


def test_a_name_of_a_variable_is_found_outside_of_its_module(repository: Path, tmp_path: Path) -> None:
    checker = module_of(repository / "tools" / "check_variables.py")
    source = 'import os\nraise SystemExit("set ONEACCORD_RANK" if os.environ["ONEACCORD_RANK"] else "ONEACCORD")\n'
    for place in (checker.OWNER, Path("plugins/owl/src/owl/plugin.py"), Path("tests/src.py")):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text(source)

    assert checker.check(tmp_path) == [
        "plugins/owl/src/owl/plugin.py:2: 'ONEACCORD_RANK': take it from core/src/oneaccord/common/variables.py, by Variable or of_setting"
    ]
