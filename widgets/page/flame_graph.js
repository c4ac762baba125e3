for (const root of document.querySelectorAll(".rankscope-flame:not(.works)")) {
  root.classList.add("works");
  const nodes = [...root.querySelectorAll(".node")];
  const whole = root.querySelector(".whole");
  const detail = root.querySelector(".detail");
  const choice = root.querySelector("select");
  const parent = (node) => node.parentElement.closest(".node");
  const spent = (node) => {
    const each = node.dataset.s.split(",").map(Number);
    return choice.value === "" ? each.reduce((a, b) => a + b, 0) : each[+choice.value];
  };
  const zoom = (target) => {
    for (const node of nodes) node.classList.remove("off", "path", "zoomed");
    whole.disabled = !target || !parent(target);
    if (whole.disabled) return;
    target.classList.add("zoomed");
    for (let node = target; node; node = parent(node)) {
      node.classList.add("path");
      for (const one of node.parentElement.children)
        if (one !== node) one.classList.add("off");
    }
  };
  const draw = () => {
    root.classList.toggle("one", choice.value !== "");
    for (const node of nodes) {
      const above = parent(node);
      const part = above ? spent(node) / (spent(above) || 1) : 1;
      node.style.width = `${100 * part}%`;
      node.style.display = part > 0 || !above ? "" : "none";
    }
  };
  const tell = (event) => {
    const button = event.target.closest(".node > button");
    if (!button) return;
    const node = button.parentElement;
    const part = (100 * spent(node)) / (spent(nodes[0]) || 1);
    detail.textContent =
      `${part.toFixed(1)} % · ` + button.title.replaceAll("\n", " · ");
  };
  root.addEventListener("click", (event) => {
    const button = event.target.closest(".node > button");
    if (button) zoom(button.parentElement);
  });
  root.addEventListener("mouseover", tell);
  root.addEventListener("focusin", tell);
  whole.addEventListener("click", () => zoom(null));
  choice.addEventListener("change", draw);
}
