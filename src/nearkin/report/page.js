// Sort tables, highlight a class on the maps, and open all details for printing.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const heads = [...table.tHead.rows[0].cells];
  const number = text => text.trim() === "" || text.trim() === "–" ? NaN : Number(text.replace(/,/g, "").replace("−", "-"));
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const rows = [...table.tBodies[0].rows];
    const keys = new Map(rows.map(row => [row, row.cells[column].textContent]));
    const numeric = rows.some(row => !Number.isNaN(number(keys.get(row))))
      && rows.every(row => !Number.isNaN(number(keys.get(row))) || /^[\s–]*$|^nan$/.test(keys.get(row)));
    const before = head.getAttribute("aria-sort");
    const down = before ? before === "ascending" : numeric;  // numbers: largest first; text: from A
    const sign = down ? -1 : 1;
    rows.sort((a, b) => {
      if (!numeric) return sign * keys.get(a).localeCompare(keys.get(b), undefined, {numeric: true});
      const x = number(keys.get(a)), y = number(keys.get(b));
      return Number.isNaN(x) || Number.isNaN(y) ? Number.isNaN(x) - Number.isNaN(y) : sign * (x - y);
    });
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    table.tBodies[0].append(...rows);
  }));
}
for (const select of document.querySelectorAll(".pick select")) {
  select.addEventListener("change", () => {
    for (const map of document.querySelectorAll("svg.map")) {
      map.classList.toggle("dim", select.value !== "");
      for (const group of map.querySelectorAll(".class")) {
        const on = group.dataset.class === select.value;
        group.classList.toggle("on", on);
        if (on) group.parentNode.insertBefore(group, map.querySelector(".proxies"));
      }
    }
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(each => { each.open = true; }));
