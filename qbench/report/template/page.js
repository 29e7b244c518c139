"use strict";
(() => {
  // Titles become tooltips that follow the pointer; without this script the browser shows them itself.
  const tip = document.getElementById("tip");
  for (const title of document.querySelectorAll("svg title")) {
    const owner = title.parentNode;
    owner.dataset.tip = title.textContent;
    owner.setAttribute("aria-label", title.textContent);
    title.remove();
  }
  document.addEventListener("pointermove", (event) => {
    const owner = event.target.closest("[data-tip]");
    tip.hidden = !owner;
    if (!owner) return;
    tip.textContent = owner.dataset.tip;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const above = event.clientY + 18 + tip.offsetHeight > innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
  });

  // Pointing at a variant anywhere lights it in every chart.
  const series = [...document.querySelectorAll(".series")];
  document.addEventListener("pointerover", (event) => {
    const owner = event.target.closest("[data-v]");
    document.body.classList.toggle("lit", Boolean(owner));
    for (const one of series) one.classList.toggle("on", Boolean(owner) && one.dataset.v === owner.dataset.v);
  });

  // Click or Enter on a heading sorts; rows without a number stay last.
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    heads.forEach((head, index) => {
      head.tabIndex = 0;
      const sort = () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const key = (row) => {
          const cell = row.cells[index];
          return index === 0 ? cell.textContent : "value" in cell.dataset ? Number(cell.dataset.value) : null;
        };
        const rows = [...body.rows].sort((a, b) => {
          const [x, y] = [key(a), key(b)];
          if (x === null || y === null) return (x === null) - (y === null);
          const order = typeof x === "string" ? x.localeCompare(y) : x - y;
          return up ? order : -order;
        });
        body.append(...rows);
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
  }

  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
})();
