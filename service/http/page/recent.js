// The rows that each expert has scored within the last minute, as far as this page has looked.

const SECONDS = 60;

export class Recent {
  #looks = [];

  clear() {
    this.#looks = [];
  }

  take(experts, now) {
    const rows = experts.map((expert) => expert.rows);
    const last = this.#looks.at(-1);
    // The server has begun to count anew.
    if (last && rows.some((value, expert) => value < last.rows[expert])) this.clear();
    this.#looks = [...this.#looks.filter((look) => now - look.now <= SECONDS), { now, rows }];
    const first = this.#looks[0].rows;
    return rows.map((value, expert) => value - first[expert]);
  }
}
