// A key that came behind the # of the address is brought as if it had been typed. It is in no log and no history.

const key = decodeURIComponent(location.hash.slice(1));
if (key) {
  history.replaceState(null, "", "/login");
  document.getElementById("token").value = key;
  document.querySelector("form").submit();
}
