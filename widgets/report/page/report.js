const button = document.querySelector("header button");
const all = [...document.querySelectorAll("details")];
button.hidden = all.length === 0;
button.addEventListener("click", () => {
  const open = all.some((one) => !one.open);
  for (const one of all) one.open = open;
  button.textContent = open ? "Fold all" : "Unfold all";
});
