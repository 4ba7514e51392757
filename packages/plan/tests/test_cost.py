"""Bills of three workloads, each amount worked out by hand; what a changed price changes; sensitivity."""

import datetime
import json
import re
import shutil
from decimal import Decimal
from pathlib import Path

import pytest

from modelwright.cli.main import main
from modelwright.core.config import ConfigError, parse
from modelwright.recipes.load import RECIPES
from modelwright_plan.cost.bill import Bill, bill_tornado, make_bill
from modelwright_plan.cost.prices import OLD_AFTER_DAYS, Price, PriceTable, age_warnings, load_prices, shipped_prices
from modelwright_plan.cost.workload import Workload, load_workload
from refusals import config_error

ROWS = [
    {"kind": "compute", "name": "big", "usd": "32.77", "purchase": "on_demand"},
    {"kind": "compute", "name": "big", "usd": "9.83", "purchase": "spot"},
    {"kind": "compute", "name": "small", "usd": "0.526", "purchase": "on_demand"},
    {"kind": "compute", "name": "small", "usd": "0.331", "purchase": "reserved_1y"},
    {"kind": "storage", "name": "hot", "usd": "0.023"},
    {"kind": "storage", "name": "warm", "usd": "0.0125", "minimum_days": 30},
    {"kind": "storage", "name": "cold", "usd": "0.00099", "minimum_days": 180},
    {"kind": "retrieval", "name": "cold", "usd": "0.02"},
    {"kind": "network", "name": "internet", "usd": "0"},
    {"kind": "network", "name": "internet", "usd": "0.09", "from_gib": 100},
    {"kind": "network", "name": "internet", "usd": "0.085", "from_gib": 10240},
    {"kind": "network", "name": "cross_zone", "usd": "0.02"},
]
PLACE = {"provider": "aws", "region": "us-east-1"}
DATED = {"date": "2025-01-15", "source": "a price list"}


def table() -> PriceTable:
    return PriceTable({}).updated(parse(Price, {**row, **PLACE, **DATED}) for row in ROWS)


def bill_of(**uses) -> Bill:
    return make_bill(parse(Workload, {"name": "w", **PLACE, **uses}), table())


def amounts(bill: Bill) -> list[str]:
    return [str(line.amount) for line in bill.lines]


PRETRAINING = {
    # 2 instances x 100.5 h x 32.77 = 6586.77
    "training": [{"name": "pretrain", "instance": "big", "count": 2, "hours": 100.5}],
    "storage": [
        {
            # 1024 GiB hot for 30 days: 1024 x 30 / (365/12) x 0.023 = 1024 x 0.986301... x 0.023 = 23.2293 -> 23.23
            # warm from day 30 to day 90, 60 days: 1024 x 1.972602... x 0.0125 = 25.2493 -> 25.25
            # cold from day 90 to day 365 (12 months), 275 days: 1024 x 9.041095... x 0.00099 = 9.16549 -> 9.17
            "name": "corpus", "size_bytes": "1Ti", "months": 12,
            "lifecycle": [
                {"after_days": 30, "storage_class": "warm"}, {"after_days": 90, "storage_class": "cold"},
            ],
            # 512 GiB x 0.02 = 10.24
            "retrievals": [{"storage_class": "cold", "size_bytes": "512Gi"}],
        },
    ],
}  # fmt: skip
CHAT = {
    # capacity of one: 400 x 0.5 x 730 x 3600 = 525.6 M tokens a month; 1.2e9 / 525.6e6 = 2.28 -> 3 instances
    # 3 x 0.331 x 8760 h (the whole term, although 6 months are 4380 h) = 8698.68
    "serving": [
        {
            "name": "chat", "instance": "small", "purchase": "reserved_1y", "months": 6,
            "tokens_per_month": 1.2e9, "tokens_per_s": 400, "utilization": 0.5,
        },
    ],
    "network": [
        # 100 GiB at 0; 10140 GiB x 6 x 0.09 = 5475.60; 1760 GiB x 6 x 0.085 = 897.60
        {"name": "answers", "path": "internet", "bytes_per_month": "12000Gi", "months": 6},
        # 250 GiB x 6 x 0.02 = 30.00
        {"name": "replicas", "path": "cross_zone", "bytes_per_month": "250Gi", "months": 6},
    ],
}  # fmt: skip
SPOT = {
    # Daly: delta 60 s, M 6 h = 21600 s, R 300 s. tau = sqrt(2 x 60 x 21600) (1 + sqrt(60/43200)/3 + 60/43200/9) - 60
    #   = 1609.9689 x (1 + 0.0124226 + 0.0001543) - 60 = 1570.2174 s. 10 h = 36000 s = 22 x 1570.2174 + 1455.2173 s.
    # A segment takes M e^(R/M) (e^((tau + 60)/M) - 1) = 1716.9958 s, the last one with its 1455.2173 s 1591.5800 s.
    # 22 x 1716.9958 + 1591.5800 = 39365.4866 s, billed as 39366 s. 4 x 39366 / 3600 h x 9.83 = 429.9642 -> 429.96
    "training": [
        {
            "name": "sft", "instance": "big", "count": 4, "purchase": "spot", "hours": 10,
            "interruptions_per_hour": 0.16666666666666666, "checkpoint_stall_s": 60, "recovery_s": 300,
        },
    ],
    # 200 GiB hot for less than its 12 days: 200 x 12.166... / 30.4166... = 80 GiB-months x 0.023 = 1.84
    "storage": [{"name": "checkpoints", "size_bytes": "200Gi", "months": 0.4}],
}  # fmt: skip


def test_three_bills_to_the_cent() -> None:
    assert amounts(bill_of(**PRETRAINING)) == ["6586.77", "23.23", "25.25", "9.17", "10.24"]
    assert bill_of(**PRETRAINING).total == Decimal("6654.66")
    assert amounts(bill_of(**CHAT)) == ["8698.68", "0.00", "5475.60", "897.60", "30.00"]
    assert bill_of(**CHAT).total == Decimal("15101.88")
    spot = bill_of(**SPOT)
    assert spot.lines[0].quantity * 900 == 39366
    assert amounts(spot) == ["429.96", "1.84"]


def test_half_a_cent_is_rounded_up() -> None:
    """0.5 h x 0.01 = 0.005, which binary fractions and rounding to even would make 0.00."""
    cheap = table().updated([parse(Price, {**ROWS[0], **PLACE, **DATED, "usd": "0.01"})])
    uses = {"training": [{"name": "t", "instance": "big", "hours": 0.5}]}
    (line,) = make_bill(parse(Workload, {"name": "w", **PLACE, **uses}), cheap).lines
    assert str(line.amount) == "0.01"


def test_a_short_stay_is_billed_for_the_minimum() -> None:
    (hot, cold) = bill_of(
        storage=[
            {
                "name": "s",
                "size_bytes": "100Gi",
                "months": 1,
                "lifecycle": [{"after_days": 20, "storage_class": "cold"}],
            }
        ]
    ).lines
    assert float(hot.quantity) == pytest.approx(100 * 20 / (365 / 12))
    assert float(cold.quantity) == pytest.approx(100 * 180 / (365 / 12))


@pytest.mark.parametrize("uses", [PRETRAINING, CHAT, SPOT])
def test_a_changed_price_changes_exactly_its_lines(uses: dict) -> None:
    before = bill_of(**uses)
    for price in before.prices:
        dearer = table().updated([parse(Price, {**vars(price), "usd": "1.5"})])
        after = make_bill(before.workload, dearer)
        changed = {line.price.key for line, old in zip(after.lines, before.lines, strict=True) if line != old}
        assert changed == {price.key}
        moved = [line.amount - old.amount for line, old in zip(after.lines, before.lines, strict=True)]
        assert after.total - before.total == sum(moved)


def test_sensitivity_is_what_a_new_bill_says() -> None:
    bill = bill_of(**SPOT)
    swings = {swing.name: swing for swing in bill_tornado(bill, table(), vary=0.2)}
    price = swings["price aws/us-east-1/compute/big/spot"]
    assert price.at_high - price.at_low == pytest.approx(0.4 * float(bill.lines[0].amount), abs=0.02)
    assert next(iter(swings)) in ("price aws/us-east-1/compute/big/spot", "training.0.hours")
    longer = {**SPOT, "training": [{**SPOT["training"][0], "hours": 12}]}
    assert swings["training.0.hours"].at_high == pytest.approx(float(bill_of(**longer).total))
    assert swings["training.0.recovery_s"].width < swings["training.0.interruptions_per_hour"].width
    given = bill_of(**SPOT, ranges={"training.0.hours": [5, 50]})
    assert bill_tornado(given, table(), vary=0.2)[0].name == "training.0.hours"
    with config_error("ranges"):
        bill_tornado(bill_of(**SPOT, ranges={"training.0.hour": [5, 50]}), table(), vary=0.2)


def test_the_shipped_table_is_dated_and_old_rows_are_named(tmp_path: Path) -> None:
    rows = shipped_prices().rows.values()
    assert all(row.source.startswith("https://") and row.dollars >= 0 for row in rows)
    newest = max(datetime.date.fromisoformat(row.date) for row in rows)
    assert age_warnings([row for row in rows if row.date == str(newest)], today=newest) == []
    later = newest + datetime.timedelta(days=OLD_AFTER_DAYS + 1)
    assert (
        sum(text.count("aws/us-east-1/compute/p5.48xlarge/on_demand") for text in age_warnings(rows, today=later)) == 1
    )
    own = tmp_path / "prices.yaml"
    own.write_text(
        "rows:\n- {kind: compute, provider: aws, region: us-east-1, name: p5.48xlarge, usd: 40, "
        'date: "2026-01-01", source: contract}\n'
    )
    replaced = load_prices(own)
    assert len(replaced.rows) == len(shipped_prices().rows)
    assert str(replaced.price("compute", "aws", "us-east-1", "p5.48xlarge").dollars) == "40"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{kind: compute}", "rows[0].provider: is required"),
        ("{kind: compute, provider: a, region: b, name: c, usd: free, date: '2025-01-01', source: s}", "not a price"),
        ("{kind: compute, provider: a, region: b, name: c, usd: 1, date: soon, source: s}", "write YYYY-MM-DD"),
    ],
)
def test_a_bad_row_is_named(row: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"rows:\n- {row}\n")
    with pytest.raises(ConfigError) as caught:
        load_prices(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_what_has_no_price_is_named() -> None:
    with config_error("prices", match=r"no price of compute 'bigg'; did you mean 'big'|did you mean 'big'"):
        bill_of(training=[{"name": "t", "instance": "bigg", "hours": 1}])
    with config_error("prices", match="no price of big as reserved_3y"):
        bill_of(training=[{"name": "t", "instance": "big", "hours": 1, "purchase": "reserved_3y"}])
    with config_error("training[0].interruptions_per_hour"):
        bill_of(training=[{"name": "t", "instance": "big", "hours": 1, "interruptions_per_hour": 1}])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "project.yaml"
    path.write_text(
        "provider: aws\nregion: us-east-1\ntraining:\n- {name: sft, instance: g5.xlarge, hours: 10}\n"
        "storage:\n- {name: corpus, size_bytes: 100Gi, months: 1}\n"
    )
    assert main(["plan", "cost", str(path), "--html", str(tmp_path / "bill.html")]) == 0
    text = capsys.readouterr().out
    assert "g5.xlarge on_demand, 10 h" in text
    assert "12.36" in text  # 10 x 1.006 + 100 x 0.023
    assert "believed for 2025-01-15, not checked" in text
    assert "<svg" in (tmp_path / "bill.html").read_text()
    assert main(["plan", "cost", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usd"] == "12.36"
    path.write_text("provider: aws\nregion: us-east-1\ntraining:\n- {name: sft, instance: g5.xlarge, hour: 10}\n")
    assert main(["plan", "cost", str(path)]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_the_documented_workload_has_a_bill(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")
    workload, prices = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)[:2]
    (tmp_path / "project.yaml").write_text(workload)
    (tmp_path / "prices.yaml").write_text(prices)
    table_of_user = load_prices(tmp_path / "prices.yaml")
    assert len(table_of_user.rows) == len(shipped_prices().rows) + 1
    bill = make_bill(load_workload(tmp_path / "project.yaml"), table_of_user)
    assert {line.price.kind for line in bill.lines} == {"compute", "storage", "retrieval", "network"}
    assert bill_tornado(bill, table_of_user, vary=0.25)[0].width > 0


def test_a_run_is_priced_by_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    (run / "pretrain").mkdir(parents=True)
    shutil.copy(RECIPES["tiny"], run / "config.yaml")
    (run / "run.json").write_text('{"invocations": [], "stages": {}}')
    attempts = [{"state": "killed", "wall_s": 1800.0}, {"state": "done", "wall_s": 5400.0}]
    (run / "pretrain" / "stage.json").write_text(json.dumps({"digest": "d", "attempts": attempts}))
    assert main(["plan", "cost", str(run), "--instance", "g5.xlarge", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert (line["use"], line["quantity"], line["usd"]) == ("pretrain", 2.0, "2.01")
    assert main(["plan", "cost", str(run)]) == 2
    assert "--instance: name the instance type to rent for the run" in capsys.readouterr().err
