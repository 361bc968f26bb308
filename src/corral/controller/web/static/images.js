// Images for a question: read into data URLs, which go to the model with the text and nowhere else.

const LARGEST = 8 * 1024 * 1024;
const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export function readImages(files) {
  return Promise.all([...files].map(read));
}

function read(file) {
  if (!KINDS.includes(file.type)) throw new Error(`${file.name}: attach PNG, JPEG, WebP or GIF images.`);
  if (file.size > LARGEST) throw new Error(`${file.name} is larger than 8 MiB.`);
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} could not be read.`));
    reader.readAsDataURL(file);
  });
}
