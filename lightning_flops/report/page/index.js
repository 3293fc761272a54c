// What TensorBoard imports for its tab: it loads the page, which then asks TensorBoard's server for profiles.

const here = new URL(".", import.meta.url);

/** TensorBoard says that it is dark by a class on its own body, which this frame may look at. */
function followTheme() {
  try {
    const body = window.parent.document.body;
    const follow = () => {
      document.documentElement.dataset.theme = body.classList.contains("dark-mode") ? "dark" : "light";
    };
    new MutationObserver(follow).observe(body, { attributes: true, attributeFilter: ["class"] });
    follow();
  } catch {
    // A TensorBoard inside another site's frame: the system's colours do.
    document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }
}

export async function render() {
  document.documentElement.lang = "en";
  document.documentElement.dataset.profiles = String(here);
  followTheme();
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = String(new URL("style.css", here));
  const script = document.createElement("script");
  script.src = String(new URL("page.js", here));
  const shown = new Promise((done) => style.addEventListener("load", done, { once: true }));
  document.head.append(style);
  await shown;
  document.body.append(script);
}
