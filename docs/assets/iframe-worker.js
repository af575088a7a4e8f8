/* Search for pages that are opened from a folder: browsers start no Worker there, so a hidden frame runs its script.
 *
 * Material looks for `IFrameWorker` by name to find its other files, and for "iframe-worker" in the name of this file.
 */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inner = frame.contentWindow
      inner.document.open()
      inner.document.write("<!doctype html><html><body></body></html>")
      inner.document.close()
      // In the frame, as in a worker: postMessage goes out, importScripts loads scripts in their order.
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inner.importScripts = (...urls) => urls.reduce(
        (before, next) => before.then(() => load(inner.document, next)), Promise.resolve()
      )
      load(inner.document, new URL(url, location.href).href).then(() => {
        this.frame = inner
        this.waiting.forEach(data => this.postMessage(data))
      })
    }

    postMessage(data) {
      if (this.frame) this.frame.dispatchEvent(new MessageEvent("message", { data }))
      else this.waiting.push(data)
    }
  }
  window.Worker = window.IFrameWorker
}

function load(into, url) {
  return new Promise((done, failed) => {
    const script = into.createElement("script")
    script.src = url
    script.onload = done
    script.onerror = failed
    into.body.appendChild(script)
  })
}
