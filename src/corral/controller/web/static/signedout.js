// The page of the sign-in: nobody is signed in here, so nothing of a person stays in the browser.

localStorage.removeItem("corral.playground");
