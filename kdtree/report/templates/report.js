// Sorting and filtering of the main table, and a copy button. The page says everything without it.
(function () {
  "use strict";
  var table = document.getElementById("main");
  var tools = document.querySelector(".tools");
  if (table && tools) {
    var body = table.tBodies[0], rows = Array.prototype.slice.call(body.rows);
    var filter = document.getElementById("filter"), ours = document.getElementById("ours");
    var shown = document.getElementById("shown");
    var apply = function () {
      var words = filter.value.toLowerCase().split(/\s+/).filter(Boolean), n = 0;
      rows.forEach(function (row) {
        var text = " " + row.textContent.toLowerCase() + " ";
        var hit = words.every(function (w) { return text.indexOf(w) >= 0; });
        row.hidden = !hit || (ours.checked && row.classList.contains("peer"));
        n += !row.hidden;
      });
      shown.textContent = n + " of " + rows.length + " lines";
    };
    filter.addEventListener("input", apply);
    ours.addEventListener("change", apply);
    tools.hidden = false;
    apply();
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, column) {
      var button = document.createElement("button");
      button.type = "button";
      while (head.firstChild) { button.appendChild(head.firstChild); }
      head.appendChild(button);
      button.addEventListener("click", function () {
        var down = head.getAttribute("aria-sort") !== "ascending";
        Array.prototype.forEach.call(table.tHead.rows[0].cells, function (c) { c.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", down ? "ascending" : "descending");
        var value = function (row) {
          var cell = row.cells[column], text = cell.dataset.v !== undefined ? cell.dataset.v : cell.textContent.trim();
          var number = parseFloat(text.replace(/,/g, ""));
          return head.classList.contains("num") ? (isNaN(number) ? null : number) : text;
        };
        rows.sort(function (a, b) {
          var x = value(a), y = value(b);
          if (x === null || y === null) { return (x === null) - (y === null); }  // dashes last, either way
          var order = typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true });
          return down ? order : -order;
        });
        rows.forEach(function (row) { body.appendChild(row); });
      });
    });
  }
  Array.prototype.forEach.call(document.querySelectorAll(".cmd"), function (box) {
    if (!navigator.clipboard) { return; }
    var button = document.createElement("button");
    button.type = "button";
    button.textContent = "copy";
    button.addEventListener("click", function () {
      navigator.clipboard.writeText(box.querySelector("code").textContent).then(function () { button.textContent = "copied"; });
    });
    box.appendChild(button);
  });
})();
