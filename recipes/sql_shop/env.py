"""ShopEnv: questions about a shop, whose products, customers and orders are tables of a SQLite database."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from agent_r1_trl import ToolEnv, tool
from agent_r1_trl.rewards import exact_match
from agent_r1_trl.trajectory import Trajectory

SHOP = Path(__file__).with_name("data") / "shop.sql"
"""The tables, as statements of SQL."""


class ShopEnv(ToolEnv):
    """The model looks things up until it answers; the answer is right or wrong.

    Rows have the columns `question` and `answer`.

    Args:
        shop: the file with the tables.
        **settings: settings of `ToolEnv`.
    """

    tool_call_reward = 0.0  # a call is worth what the answer is worth
    tool_error_reward = 0.0

    def __init__(self, shop: str | Path = SHOP, **settings: Any) -> None:
        super().__init__(**settings)
        self.database = sqlite3.connect(":memory:", check_same_thread=False)  # tools run on threads
        self.database.executescript(Path(shop).read_text(encoding="utf-8"))

    def look_up(self, query: str, value: str) -> str:
        """The first row that the query finds, as text."""
        cursor = self.database.execute(query, [value])
        row = cursor.fetchone()
        if row is None:
            return "Nothing found."
        names = [column[0] for column in cursor.description]
        return ", ".join(f"{name}: {field}" for name, field in zip(names, row, strict=True))

    @tool
    def product(self, name: str) -> str:
        """Look up the price and the stock of a product.

        Args:
            name: The name of the product.
        """
        return self.look_up("SELECT price, stock FROM products WHERE name = ?", name.strip())

    @tool
    def customer(self, name: str) -> str:
        """Look up where a customer lives.

        Args:
            name: The full name of the customer.
        """
        return self.look_up("SELECT city FROM customers WHERE name = ?", name.strip())

    @tool
    def last_order(self, customer: str) -> str:
        """Look up what a customer ordered last.

        Args:
            customer: The full name of the customer.
        """
        query = "SELECT product, pieces FROM orders WHERE customer = ? ORDER BY day DESC LIMIT 1"
        return self.look_up(query, customer.strip())

    def outcome_reward(self, trajectory: Trajectory) -> float:
        """1 for the right answer, else 0."""
        is_right = exact_match(trajectory.final_text, self.example["answer"])
        trajectory.info["em"] = is_right
        return is_right

    def close(self) -> None:
        """Close the database."""
        self.database.close()
