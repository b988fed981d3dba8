// Tables of numbers can be sorted: each of their headings becomes a button.
document.addEventListener("DOMContentLoaded", () => {
  const value = (cell) => {
    const text = cell.textContent.trim().replace(/,/g, "");
    const number = /^[+-]?\d+(\.\d+)?/.exec(text);
    return number ? Number(number[0]) : text.toLowerCase();
  };
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // empty cells come last
    if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
    return typeof a === "number" ? -1 : 1;
  };
  for (const table of document.querySelectorAll("table.docutils")) {
    const body = table.tBodies[0];
    const headings = table.tHead ? [...table.tHead.rows[0].cells] : [];
    const numeric = table.querySelectorAll("tbody tr:first-child td.text-right").length;
    const grouped = [...(body ? body.rows : [])].some((row) => [...row.cells].slice(1).every((cell) => !cell.textContent.trim()));
    if (!body || body.rows.length < 4 || grouped || numeric < 2) continue;
    for (const [column, heading] of headings.entries()) {
      const button = document.createElement("button");
      button.className = "sort";
      button.append(...heading.querySelector("p")?.childNodes ?? heading.childNodes);
      heading.replaceChildren(button);
      button.addEventListener("click", () => {
        const rows = [...body.rows];
        const before = heading.getAttribute("aria-sort");
        const numbers = rows.filter((row) => typeof value(row.cells[column]) === "number").length > rows.length / 2;
        const down = before ? before === "ascending" : numbers; // numbers begin with the largest
        rows.sort((a, b) => {
          const [x, y] = [value(a.cells[column]), value(b.cells[column])];
          return x === "" || y === "" || !down ? compare(x, y) : compare(y, x);
        });
        for (const other of headings) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        body.append(...rows);
      });
    }
  }
});
