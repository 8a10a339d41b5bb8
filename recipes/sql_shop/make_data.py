"""Make the shop and the questions about it: 300 to demonstrate, 200 to train on, and 200 held out.

The held-out questions are about other customers and products.

python recipes/sql_shop/make_data.py
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NUM_PRODUCTS, NUM_CUSTOMERS = 200, 320
SIZES = {"train": 200, "demonstrations": 300, "test": 200}
"""Data set -> number of its rows, of each kind as many."""
COLOURS = "red blue green white black grey brown yellow silver golden"
THINGS = (
    "lamp chair table shelf clock mirror basket carpet kettle mug bowl plate pan knife towel blanket pillow curtain "
    "vase candle radio camera bicycle tent rucksack umbrella hammer saw ladder bucket"
)
FIRST = "Ada Bruno Clara David Elena Felix Greta Hugo Ida Jonas Karla Leo Mara Nils Olga Paul Rita Simon Tara Viktor"
LAST = (
    "Adler Berg Costa Dahl Engel Fischer Garcia Holm Ivanov Jensen Keller Lund Moreno Novak Olsen Peters Rossi Stein "
    "Torres Weber"
)
CITIES = (
    "Amsterdam Athens Barcelona Bergen Berlin Bilbao Bologna Bremen Dresden Dublin Florence Geneva Genoa Hamburg "
    "Helsinki Krakow Lisbon London Lyon Madrid Malaga Milan Naples Oslo Paris Porto Prague Riga Rome Turin Vienna "
    "Warsaw Zurich"
)
KINDS = {
    "price": "What does the {product} cost?",
    "city": "In which city does {customer} live?",
    "ordered": "What did {customer} order last?",
    "price of order": "What is the price of what {customer} ordered last?",
    "stock of order": "How many are in stock of what {customer} ordered last?",
}
"""Kind of question -> its text. The last two take two calls."""

Table = dict[str, dict[str, Any]]
"""Name -> columns."""


def make_shop(rng: random.Random) -> tuple[Table, Table]:
    """Products and customers; what a customer ordered last is a column of the customer."""
    names = rng.sample([f"{colour} {thing}" for colour in COLOURS.split() for thing in THINGS.split()], NUM_PRODUCTS)
    products = {name: {"price": rng.randint(10, 99), "stock": rng.randint(10, 99)} for name in names}
    people = rng.sample([f"{first} {last}" for first in FIRST.split() for last in LAST.split()], NUM_CUSTOMERS)
    cities = CITIES.split()
    customers = {
        name: {"city": rng.choice(cities), "product": rng.choice(names), "pieces": rng.randint(2, 9)}
        for name in people
    }
    return products, customers


def statements(products: Table, customers: Table, rng: random.Random) -> str:
    """The shop in SQL. Each customer has an older order as well."""
    lines = [
        "CREATE TABLE products (name TEXT PRIMARY KEY, price INTEGER, stock INTEGER);",
        "CREATE TABLE customers (name TEXT PRIMARY KEY, city TEXT);",
        "CREATE TABLE orders (customer TEXT, product TEXT, pieces INTEGER, day INTEGER);",
    ]
    for name, columns in products.items():
        lines.append(f"INSERT INTO products VALUES ('{name}', {columns['price']}, {columns['stock']});")
    for name, columns in customers.items():
        lines.append(f"INSERT INTO customers VALUES ('{name}', '{columns['city']}');")
        older, last = sorted(rng.sample(range(1, 366), 2))
        other = rng.choice(list(products))
        lines.append(f"INSERT INTO orders VALUES ('{name}', '{other}', {rng.randint(2, 9)}, {older});")
        lines.append(f"INSERT INTO orders VALUES ('{name}', '{columns['product']}', {columns['pieces']}, {last});")
    return "\n".join(lines) + "\n"


def make_row(kind: str, name: str, products: Table, customers: Table) -> dict[str, Any]:
    """A question about a product (`price`) or a customer, and its answer."""
    if kind == "price":
        return {"question": KINDS[kind].format(product=name), "answer": str(products[name]["price"]), "name": name}
    columns = customers[name]
    ordered = products[columns["product"]]
    answers = {
        "city": columns["city"],
        "ordered": columns["product"],
        "price of order": str(ordered["price"]),
        "stock of order": str(ordered["stock"]),
    }
    row = {"question": KINDS[kind].format(customer=name), "answer": answers[kind], "name": name}
    return row | ({"product": columns["product"]} if kind.endswith("of order") else {})


def make_rows(
    names: list[list[str]], sizes: dict[str, int], shop: tuple[Table, Table], rng: random.Random
) -> dict[str, list[dict[str, Any]]]:
    """Data set -> its rows; no question occurs twice. `names` are those of products and of customers."""
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in sizes}
    for kind in KINDS:
        of_kind = list(names[0] if kind == "price" else names[1])
        rng.shuffle(of_kind)
        for split, size in sizes.items():
            for _ in range(size // len(KINDS)):
                rows[split].append({"kind": kind, **make_row(kind, of_kind.pop(), *shop)})
    for split, listed in rows.items():
        rng.shuffle(listed)
        rows[split] = [{"id": f"{split}-{number}", **row} for number, row in enumerate(listed)]
    return rows


def main() -> None:
    """Write data/shop.sql, and the rows of each data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "data")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    shop = make_shop(rng)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "shop.sql").write_text(statements(*shop, rng), encoding="utf-8")
    seen, held_out = ([list(table)[index::2] for table in shop] for index in (0, 1))
    rows = make_rows(seen, {split: SIZES[split] for split in ("train", "demonstrations")}, shop, rng)
    rows |= make_rows(held_out, {"test": SIZES["test"]}, shop, rng)
    for split, listed in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in listed)
        (args.out / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
