const button = document.querySelector("header button");
button.hidden = false;
button.addEventListener("click", () => {
  const all = [...document.querySelectorAll("details")];
  const open = all.some((one) => !one.open);
  for (const one of all) one.open = open;
  button.textContent = open ? "Fold all" : "Unfold all";
});
