"""Collect finished run folders into one result file each: python benchmarks/collect.py RUN… -o FOLDER

A result file holds the command to reproduce it, all settings, the scores with their provenance, and the log.
"""

import argparse
import json
import shlex
from pathlib import Path

from nearkin.files import read_json, write_json
from nearkin.networks.backbones import backbone_settings
from nearkin.training.plan import Plan
from nearkin.training.run_folder import RunFolder


def command(plan: dict[str, object]) -> str:
    """The command line that trains this plan, with only the options that differ from the defaults."""
    backbone = str(plan["backbone"])
    default = json.loads(json.dumps({**vars(Plan()), **backbone_settings(backbone)}))
    words = ["nearkin", "train"]
    for name, value in plan.items():
        if value != default[name]:
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else flag.replace("--", "--no-", 1))
            else:
                words += [flag, ",".join(value) if isinstance(value, list) else str(value)]
    return shlex.join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    for path in given.runs:
        run = RunFolder(path)
        config = read_json(run.config)
        record = {
            "command": command(config["plan"]),
            "config": config,
            "result": read_json(run.result),
            "log": run.events(),
        }
        write_json(given.out / f"{path.name}.json", record)
        print(given.out / f"{path.name}.json")


if __name__ == "__main__":
    main()
